"""Small parts trained beside a frozen model on its own answers: data, what is trained, and the loop that trains it."""
