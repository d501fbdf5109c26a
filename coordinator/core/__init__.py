"""The pure machines of the coordinator: frozen states, explicit time, no I/O, no randomness, no logging.

`barrier` (who has arrived), `rounds` (the global barriers of a run), `order` (which agent may update), `tables` (turns of an episode),
`versions` (which worker serves what), `routing` (which worker gets a request), `roster` (who is a member), composed by `coordinator`.
"""
