#!/usr/bin/env bash
# Makes the data and what Weka's J48 and C5.0 say of it; README.md says what is needed.
#
#   make.sh WEKA_JARS EXAMPLES C50.so
set -euo pipefail

jars=$1 examples=$2 c50=$3
cd "$(dirname "${BASH_SOURCE[0]}")"
mkdir -p data j48 c50
arff=$(mktemp -d)
trap 'rm -r "$arff"' EXIT
cp "$examples"/*.arff "$arff"
# The refractive index as (RI - 1) * 1000: C4.5 and J48 see no difference of 1e-5, which is the data's precision.
awk -F, -v OFS=, '/^[0-9]/ { $1 = sprintf("%.2f", ($1 - 1) * 1000) } 1' "$examples/glass.arff" >"$arff/glass.arff"
declare -A options=(
    [pruned]='' [unpruned]='-U' [no-raising]='-S' [middle]='-doNotMakeSplitPointActualValue' [no-cost]='-J'
    [confidence-5]='-C 0.05' [cases-10]='-M 10'
)
for name in iris weather.nominal weather.numeric glass labor vote breast-cancer contact-lenses soybean; do
    python3 convert.py "$arff/$name.arff" "data/$name"
    for kind in "${!options[@]}"; do
        # shellcheck disable=SC2086 # options are several words
        java -cp "$jars/*" weka.classifiers.trees.J48 ${options[$kind]} -no-cv -t "$arff/$name.arff" 2>/dev/null |
            sed -n '/^J48 /,/^Size of the tree/p' >"j48/$name.$kind.txt"
    done
    for run in '1 0' '1 1' '10 1'; do
        # shellcheck disable=SC2086 # two arguments
        Rscript c50.R "$c50" "data/$name" $run >"c50/$name.trials-${run% *}.global-${run#* }.txt"
    done
done
