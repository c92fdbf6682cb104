"""The user's step as data: traced, its data flow, its logical axes, its sites."""
