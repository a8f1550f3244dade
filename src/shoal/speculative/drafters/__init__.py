"""Drafters of other tools that are not EAGLE's: what their files say, and how they guess beside the target."""
