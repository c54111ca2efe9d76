"""tfps: TensorFlow 1.x-style parameter-server training on today's TensorFlow."""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
VERSION = re.search(r'__version__ = "(.+)"', (HERE / "tfps/__init__.py").read_text())[1]

setup(
    name="tfps",
    version=VERSION,
    description="TensorFlow 1.x-style parameter-server training, on today's TensorFlow, anywhere",
    long_description=(HERE / "README.md").read_text(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["tfps", "tfps.*"]),
    package_data={"tfps.data": ["digits.npz", "digits.LICENSE"]},
    python_requires=">=3.10",
    install_requires=["absl-py>=1.4", "numpy>=1.24", "PyYAML>=6.0", "rich>=13.0"],
    extras_require={  # either TensorFlow will do, so neither is forced on those who have the other
        "tensorflow": ["tensorflow>=2.16"],
        "cpu": ["tensorflow-cpu>=2.16"],
        "ray": ["ray[default]>=2.40"],
        "dev": [
            *("mypy>=1.10", "ruff>=0.6", "types-PyYAML"),
            *("pytest>=8.0", "pytest-timeout>=2.3", "pytest-xdist>=3.5", "scikit-learn>=1.3"),
            *("jsonschema>=4.20", "kubernetes-validate>=1.29", "kubeflow-training>=1.8", "kubeflow-trainer-api>=2.0"),
        ],
    },
    entry_points={"console_scripts": ["tfps = tfps.cli.main:main"]},
)
