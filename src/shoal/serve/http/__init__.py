"""The HTTP face: routes, what every request passes, metrics, the page."""
