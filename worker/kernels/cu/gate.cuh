// The gate of a gated MLP, of one number: silu(gate) · up, silu(x) = x / (1 + e^-x) (Shazeer 2020, "GLU Variants Improve Transformer").
#pragma once
#include "dev.cuh"

DEVICE float silu_mul_one(float gate, float up) { return divide(gate, 1.f + exp2_approx(-gate * LOG2_E)) * up; }
