"""The three rungs: propagate, compile, profile. Candidate -> Estimate, Measurement or Failure."""
