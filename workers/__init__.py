"""Holds the compute side: dispatch, rank groups, worker processes and sampling engines. Knows no HTTP and never imports
the server.
"""
