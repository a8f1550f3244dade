"""Training of small components beside a frozen model on its own answers: data, modules, and the training loop."""
