"""The rows of OpenAI's API in the tables of a server."""

from .routes import list_models, router

ROUTERS = {"openai": router}
MODEL_LISTS = {"openai": list_models}
