"""Rung 3: run, check, race, trace; calibration."""
