"""Lints and renders the chart with Helm's own engine; run by the Python of .venv-deploy.

Reads values as JSON from standard input. Prints JSON: what lint says, and the rendered files or the error.
"""

import json
import sys

import helm_python as helm

if __name__ == "__main__":
    chart, values = sys.argv[1], json.load(sys.stdin)
    linted = [each for each in helm.lint(chart, values, strict=True)["messages"] if each["severity"] > 1]
    try:
        with helm.Chart.load(chart) as loaded:
            loaded.validate_schema(values)
            rendered = loaded.render(values, name="house", namespace="training")
        print(json.dumps({"linted": linted, "rendered": rendered}))
    except helm.HelmError as error:
        print(json.dumps({"linted": linted, "error": str(error)}))
