"""Plain data that all parts share."""
