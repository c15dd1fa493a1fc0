"""Numbers for people: statistics, and how a terminal shows them."""
