"""Lets tools without PEP 517 install tfps; its metadata is in pyproject.toml."""

from setuptools import setup

setup()
