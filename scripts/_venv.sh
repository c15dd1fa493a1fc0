# Sourced by the other scripts: makes .venv, or brings it up to date, and puts it first on PATH.
# usage: . scripts/_venv.sh EXTRAS [oldest]      (EXTRAS: "" or "[test]")
# oldest: .venv-oldest instead, with the oldest versions that pyproject.toml allows of the packages it names.

extras=$1
venv=.venv${2:+-$2}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root" || exit 1

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3 python3.13 python3.12 python3.11 python; do
        [ -n "$candidate" ] || continue
        if "$candidate" -c 'import sys, venv; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "packtool needs Python 3.11, 3.12 or 3.13 with its venv module; set PYTHON to one." >&2
    return 1
}

# What the environment was made from: when it changes, packages are installed again.
wanted="$extras $(cat pyproject.toml scripts/constraints.txt | cksum)"
stamp=$venv/packtool-stamp
have=$(cat "$stamp" 2>/dev/null || true)

if [ "$have" != "$wanted" ] && [ "$have" != "${wanted/#$extras /[test] }" ]; then
    if [ ! -x "$venv/bin/python" ]; then
        python=$(find_python) || exit 1
        echo "Making $venv with $("$python" --version) ..." >&2
        "$python" -m venv "$venv"
    fi
    echo "Installing packtool$extras (torch is large: a few minutes the first time) ..." >&2
    install() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check "$@" 2> >(grep -v '^WARNING' >&2); }
    if [ "$venv" = .venv-oldest ]; then  # pip always takes the newest versions
        install uv
        "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --upgrade --resolution lowest-direct \
            --editable ".$extras"
    else
        install --constraint scripts/constraints.txt --editable ".$extras"
    fi
    echo "$wanted" > "$stamp"
fi
export PATH="$root/$venv/bin:$PATH"
