"""What several methods share: base classes, limits of options, combinations. The registry looks for no method here."""
