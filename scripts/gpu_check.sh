#!/usr/bin/env bash
# Everything that only a GPU can prove, in one command and under 6 minutes; one JSON line last, the same in $OUT/report.json.
#
#     scripts/gpu_check.sh [--device cuda:1] [--short]
#
# Needs nvcc, cmake, ninja and a Python with pybind11, numpy and torch; the native suite needs pytest and hypothesis too
# (build/gpu_site is on the path: pip install --target build/gpu_site pytest hypothesis). Installs nothing and changes
# nothing outside build/ and $OUT. A step that fails does not stop those after it; `passed` is true when none failed and
# none was left out. With --device emulated --short it checks itself where there is no GPU: the kernels on the processor.
set -uo pipefail
cd "$(dirname "$0")/.."
device=cuda short=
while (($#)); do
    case $1 in
    --device) device=$2 && shift 2 ;;
    --short) short=--short && shift ;;
    *) echo "$1 is not accepted; expected --device D or --short" >&2 && exit 2 ;;
    esac
done
python=${PYTHON:-python3} build=build/gpu site=build/gpu/site OUT=${OUT:-build/gpu_check}
mkdir -p "$OUT" "$build" "$site/tinyloop_serve/native"
rm -f "$OUT"/*.json "$OUT"/*.log "$OUT"/steps
export TINYLOOP_BACKEND_PATH=$PWD/$build:$PWD/build/native${TINYLOOP_BACKEND_PATH:+:$TINYLOOP_BACKEND_PATH} PYTHONDONTWRITEBYTECODE=1
export PYTHONPATH=$PWD/$site:$PWD:$PWD/build/gpu_site

# step NAME SECONDS COMMAND...: its output goes to NAME.log; a last line that is a JSON object, to NAME.json
step() {
    local name=$1 limit=$2 start=$SECONDS status
    shift 2
    echo "== $name (at most $limit s)"
    timeout --kill-after=5 "$limit" "$@" >"$OUT/$name.log" 2>&1
    status=$?
    tail -n 1 "$OUT/$name.log" | grep '^{.*}$' >"$OUT/$name.json" || rm "$OUT/$name.json"
    printf '%s %s %s\n' "$name" "$status" $((SECONDS - start)) >>"$OUT/steps"
    ((status == 0)) || { echo "   status $status:" && tail -n 15 "$OUT/$name.log" | cut -c 1-300; }
    return "$status"
}
left_out() { # NAME REASON
    echo "== $1: left out: $2"
    printf '%s left_out %s\n' "$1" "$2" >>"$OUT/steps"
}
has() { "$python" -c "import $1" 2>/dev/null; }

# The package as it is imported, with the core and the plug-in of this build.
assemble() {
    local folder file
    for folder in protocol dispatcher replica deploy; do ln -sfn "$PWD/$folder" "$site/tinyloop_serve/$folder"; done
    for file in native/*; do
        [[ $file == *.so ]] || ln -sfn "$PWD/$file" "$site/tinyloop_serve/native/"
    done
    cp "$build"/_core*.so "$site/tinyloop_serve/native/"
}
compile() {
    local cuda=OFF
    [[ $device == cuda* ]] && cuda=ON
    cmake -G Ninja -S native -B "$build" -DSKBUILD=ON -DTINYLOOP_CUDA=$cuda \
        -DCMAKE_CUDA_ARCHITECTURES=native -DPython_EXECUTABLE="$("$python" -c 'import sys; print(sys.executable)')" \
        -Dpybind11_DIR="$("$python" -m pybind11 --cmakedir)" && cmake --build "$build" && assemble || return
    [[ $device != emulated* ]] || { # of the C++ tests' build
        cmake -G Ninja -S native -B build/native && cmake --build build/native --target tinyloop_emulated
    }
}
suite() {
    local tests=(tests/native/test_engine.py tests/native/test_modes.py tests/native/test_use_errors.py
        tests/native/test_api_machine.py tests/native/test_engine_api.py)
    [[ -z $short ]] || tests=(tests/native/test_engine.py -k "fp16 and reference and (llama or huginn)")
    TINYLOOP_TEST_DEVICE=$device "$python" -m pytest -c /dev/null --rootdir=. -o pythonpath=. --import-mode=importlib \
        -p no:cacheprovider -q "${tests[@]}"
}
gpu() { "$python" scripts/bench/gpu.py --device "$device" $short "$@"; }
sanitize() { # TOOL
    compute-sanitizer --tool "$1" --error-exitcode 9 "$python" scripts/bench/gpu.py --device "$device" --only touch
}
export -f compile assemble suite gpu sanitize
export device short python build site

if step build 170 bash -c compile; then
    step same 40 bash -c "gpu --only same"
    step bits 40 bash -c "gpu --only bits"
    if has pytest; then step suite 100 bash -c suite; else left_out suite "this Python has no pytest"; fi
    if [[ $device != cuda* ]]; then
        step touch 60 bash -c "gpu --only touch"
    elif command -v compute-sanitizer >/dev/null; then
        step memcheck 45 bash -c "sanitize memcheck"
        step racecheck 45 bash -c "sanitize racecheck"
    else
        left_out memcheck "no compute-sanitizer"
    fi
    step speed 120 bash -c "gpu --only speed"
fi
exec "$python" scripts/bench/gpu.py --report "$OUT"
