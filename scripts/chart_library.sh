#!/usr/bin/env bash
# Builds h2o_flexgen/pages/assets/echarts.min.js, the parts of Apache ECharts that pages use, by npm and esbuild.
set -euo pipefail
cd "$(dirname "$0")/.."
assets=$PWD/h2o_flexgen/pages/assets
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
npm init -y >/dev/null
npm install --silent echarts@6.1.0 esbuild@0.28.2
cat >entry.js <<'EOF'
import { use, init, version } from "echarts/core";
import { BarChart, LineChart, ScatterChart, CustomChart } from "echarts/charts";
import { GridComponent, TooltipComponent, LegendComponent, DataZoomComponent } from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";
use([BarChart, LineChart, ScatterChart, CustomChart, GridComponent, TooltipComponent, LegendComponent, DataZoomComponent,
  CanvasRenderer]);
export { init, version };
EOF
npx esbuild entry.js --bundle --minify --format=iife --global-name=echarts --legal-comments=none \
  --define:process.env.NODE_ENV='"production"' --outfile="$assets/echarts.min.js"
