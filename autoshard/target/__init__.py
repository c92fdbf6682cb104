"""Where a program runs, and what things cost there."""
