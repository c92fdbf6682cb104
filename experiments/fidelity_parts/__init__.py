"""The parts of `experiments.fidelity`, without flags.

`searching`, `sampling`, `hand` each make one JSON file for a case; `report` and what it uses
(`ranks`, `regret`, `leave_out`, `goals`) are pure functions of those files.
"""
