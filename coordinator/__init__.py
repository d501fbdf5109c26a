"""The agent protocol coordinator: pure machines (`core`), daemons and composition (`app`), commands (`cli`)."""
