// Each chosen measure over the layers, at a few steps, and a table of the peaks.

import { forgetPanels } from "./dashboard-charts.js";
import { drawAnswer } from "./view-panels.js";

export const choices = true; // measures are chosen at the side
export const forget = forgetPanels;
export const draw = (view, s, current) => drawAnswer(view, s, current, { measure: s.chosen.measures });
