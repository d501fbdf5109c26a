"""The pure machines of the coordinator: explicit time, no I/O, no randomness, no logging.

`barrier` (who has arrived), `rounds` (the global barriers of a run), `order` (which agent may update), `versions` (which worker serves
what), `tables` (the turn gate of one episode), `routing` (which worker gets a request), `roster` (who is a member): frozen states. `run`
(one admitted run) and `turns` (the tables of all runs) hold and join them, `coordinator` composes everything.
"""
