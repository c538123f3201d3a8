"""Draft models on the server: their operations and routes, and the features captured for them."""
