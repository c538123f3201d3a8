"""A model's shape under a layout: each rank's parameters and operations, and layouts that are refused."""
