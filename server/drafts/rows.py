"""The rows of drafts in the tables of a server."""

from .feature_store import FeatureStore
from .room import reserve_features
from .routes import router

ROUTERS = {"drafts": router}
FEATURES = {"files": FeatureStore}
RESERVATIONS = {"features": reserve_features}
