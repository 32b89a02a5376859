#!/usr/bin/env bash
# SECONDS of fuzzing for each target; what it found before is kept in .fuzz/ and tried first.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${1:?python} seconds=${2:?seconds}
if ! "$python" -c 'import atheris' 2>/dev/null; then
  if ! "$python" -m pip install -q --disable-pip-version-check -r requirements-fuzz.txt; then
    echo "make fuzz: skipped: atheris cannot be installed for $("$python" --version) (above)"
    exit 0
  fi
fi
for target in sse body; do
  mkdir -p ".fuzz/$target"
  echo "fuzz_$target: $seconds s"
  "$python" "tests/fuzz/fuzz_$target.py" -max_total_time="$seconds" \
    -artifact_prefix=.fuzz/ -dict="tests/fuzz/$target.dict" -print_final_stats=1 -verbosity=1 \
    -max_len=4096 ".fuzz/$target" 2>&1 | grep -v "^#\|INFO\|NEW_FUNC" || exit 1
done
