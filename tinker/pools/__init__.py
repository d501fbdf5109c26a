"""Resource pools: workers of one kind, each an actor with a bounded queue and a capacity, on one engine."""
