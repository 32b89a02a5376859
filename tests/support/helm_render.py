"""Render and lint a Helm chart: run by the Python of `make deploy-tools`, which has Helm's library.

Reads {"chart", "values"} from standard input. Writes {"manifests", "messages"} or {"error"}.
"""

import json
import sys

from helm_python import Chart, lint  # type: ignore[import-not-found]


def main() -> None:
    request = json.load(sys.stdin)
    try:
        with Chart.load(request["chart"]) as chart:
            manifests = chart.render(request["values"], name="forebay", namespace="serving")
        report = lint(request["chart"], request["values"], strict=True)
    except Exception as error:  # whatever Helm says about the values
        json.dump({"error": str(error)}, sys.stdout)
    else:
        json.dump({"manifests": manifests, "messages": report["messages"]}, sys.stdout)


if __name__ == "__main__":
    main()
