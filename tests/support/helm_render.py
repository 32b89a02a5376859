"""Render and lint a Helm chart: run by the Python of `make deploy-tools`, which has Helm's library.

Reads {"chart", "values"} from standard input; writes {"manifests", "messages"} or {"error"}.
"""

import json
import sys

from helm_python import Chart, lint  # type: ignore[import-not-found]


def main() -> None:
    asked = json.load(sys.stdin)
    try:
        with Chart.load(asked["chart"]) as chart:
            manifests = chart.render(asked["values"], name="forebay", namespace="serving")
        found = lint(asked["chart"], asked["values"], strict=True)
    except Exception as error:  # whatever Helm says about the values
        json.dump({"error": str(error)}, sys.stdout)
    else:
        json.dump({"manifests": manifests, "messages": found["messages"]}, sys.stdout)


if __name__ == "__main__":
    main()
