"""What everything runs on: clock, codec, transport, actors, and the data plane."""
