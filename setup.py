"""pyproject.toml says the rest: this keeps `pip install .` from leaving build/, which the next wheel would contain."""

import tempfile

from setuptools import setup

with tempfile.TemporaryDirectory() as scratch:
    # script_name keeps setuptools from taking setup.py for a module of the package.
    setup(script_name="setup.py", options={"build": {"build_base": scratch}, "egg_info": {"egg_base": scratch}})
