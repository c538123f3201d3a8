"""The console: pages for browsers at /console, over the services behind the API's routes."""
