"""Print a dashboard as Grafana's own types read it: run by the Python of `make deploy-tools`.

Unknown keys are lost, so a mistyped key shows as a difference.
"""

import json
import sys
from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder  # type: ignore[import-not-found]
from grafana_foundation_sdk.models.dashboard import Dashboard  # type: ignore[import-not-found]

if __name__ == "__main__":
    read = Dashboard.from_json(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    print(JSONEncoder().encode(read))
