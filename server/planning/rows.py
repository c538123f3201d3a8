"""The planner's rows in the tables of a server."""

from .auto_layout import with_auto_layouts

LAYOUT_CHOICES = {"auto": with_auto_layouts}
