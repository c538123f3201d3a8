"""The console in a real headless Chromium, on a live server."""
