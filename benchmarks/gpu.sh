#!/usr/bin/env bash
# What docs/performance.md says about GPUs, measured: one file a line, in about ten minutes (twice that the first time, when
# everything has to be compiled). Files that are there already stay; a benchmark that fails leaves none.
#
#     bash benchmarks/gpu.sh VOC_FOLDER FOLDER_FOR_RESULTS
set -uo pipefail
[ $# = 2 ] || { sed -n 2,6p "$0"; exit 2; }
voc=$(realpath "$1") out=$(realpath "$2")
cd "$(dirname "$0")"
mkdir -p "$out"

measure() {
  local name=$1 && shift
  if [ -e "$out/$name.json" ]; then return; fi
  if python "$@" --json > "$out/$name.tmp"; then mv "$out/$name.tmp" "$out/$name.json"; else rm "$out/$name.tmp"; fi
  echo "$name: $(ls "$out" | grep -c json) files after $SECONDS s"
}

measure kernels kernels.py
measure new-sizes sizes.py
measure new-sizes-without sizes.py --without --sizes 5
measure step-resnet101-batch8 step.py --batch 8 --methods ft "kd only" sdr "step 0" --profile
measure step-without-kernels-graph step.py --batch 8 --methods ft sdr --speed graph --without norm depthwise upsampling pixels rows all
measure step-without-kernels-compile step.py --batch 8 --methods ft sdr --speed compile --without depthwise upsampling pixels
measure step-resnet101-batch24 step.py --batch 24 --methods ft sdr --speed graph compile --repeat 20
measure pipeline-graph pipeline.py voc:15-1@disjoint --data "$voc" --speed graph --iterations 70 --transforms crop512 --without views
measure pipeline-graph-2-threads pipeline.py voc:15-1@disjoint --data "$voc" --speed graph --iterations 70 --transforms crop512 --workers 2
measure pipeline-compile pipeline.py voc:15-1@disjoint --data "$voc" --speed compile --iterations 150 --transforms crop512
measure step-resnet101-151-classes step.py --classes 101+50 --batch 4 16 --speed graph compile --methods ft sdr --repeat 20
measure step-resnet50-batch16 step.py --encoder resnet50 --batch 16 --methods ft sdr
measure growth-classes step.py --batch 8 --classes 2+1 51+10 101+50 --speed graph --methods ft sdr --repeat 10 --warm 5
measure growth-batch step.py --batch 2 4 8 16 24 32 --speed graph --methods ft sdr --repeat 10 --warm 5
measure growth-size step.py --batch 8 --size 256 384 768 --speed graph --methods ft sdr --repeat 10 --warm 5
