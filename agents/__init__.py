"""Agents: the players that sit at a table, and the learners that turn one agent's episodes into training rows."""
