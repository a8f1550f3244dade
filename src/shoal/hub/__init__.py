"""Models by name: what a name means on the Hub, what of it is on this machine, and how it is fetched."""
