//! The kernels' machine code, as `build_cubins.py` made it, and which of it a GPU runs.
//!
//! Next: [`super::gpu`] loads it.

use cudarc::nvrtc::Ptx;

/// One file of `cu/`, compiled.
pub(super) struct Module {
    /// Its file in `cu/`.
    pub(super) name: &'static str,
    sm_80: &'static [u8],
    sm_90a: &'static [u8],
    sm_100: &'static [u8],
    sm_120: &'static [u8],
    ptx: &'static str,
    /// Its kernels.
    pub(super) kernels: &'static [&'static str],
}

macro_rules! modules {
    ($($name:literal: $($kernel:literal)*;)*) => {
        /// All files.
        pub(super) const MODULES: &[Module] = &[$(Module {
            name: $name,
            sm_80: include_bytes!(concat!("../../cubins/", $name, ".sm_80.cubin")),
            sm_90a: include_bytes!(concat!("../../cubins/", $name, ".sm_90a.cubin")),
            sm_100: include_bytes!(concat!("../../cubins/", $name, ".sm_100.cubin")),
            sm_120: include_bytes!(concat!("../../cubins/", $name, ".sm_120.cubin")),
            ptx: include_str!(concat!("../../cubins/", $name, ".ptx")),
            kernels: &[$($kernel),*],
        }),*];
    };
}

modules! {
    "adjust_logits": "adjust_logits";
    "attention_combine": "attention_combine";
    "attention_decode": "attention_decode_64" "attention_decode_128" "attention_decode_256";
    "attention_mixed": "attention_mixed_64" "attention_mixed_128" "attention_mixed_256";
    "attention_prefill": "attention_prefill_64" "attention_prefill_128" "attention_prefill_256";
    "gather": "embed" "select_rows";
    "linear_few_rows": "linear_few_rows_8" "linear_few_rows_16";
    "moe_gemm": "moe_gemm";
    "moe_group": "moe_group";
    "moe_route": "moe_route";
    "moe_sum": "moe_sum";
    "rms_norm": "rms_norm";
    "rope_store": "rope_store_64" "rope_store_128" "rope_store_256";
    "sample": "sample";
    "silu_mul": "silu_mul";
}

/// What only compute capability 9.0 runs, as machine code alone.
pub(super) struct HopperModule {
    /// Its file in `cu/`.
    pub(super) name: &'static str,
    code: &'static [u8],
    /// Its kernels.
    pub(super) kernels: &'static [&'static str],
}

/// All such files.
pub(super) const HOPPER_MODULES: &[HopperModule] = &[HopperModule {
    name: "attention_prefill_wgmma",
    code: include_bytes!("../../cubins/attention_prefill_wgmma.sm_90a.cubin"),
    kernels: &["attention_prefill_wgmma_64", "attention_prefill_wgmma_128", "attention_prefill_wgmma_256"],
}];

impl HopperModule {
    pub(super) fn image(&self) -> Ptx {
        Ptx::from_binary(self.code.to_vec())
    }
}

impl Module {
    /// What a GPU of this compute capability runs: machine code of its generation, or PTX that the driver compiles.
    pub(super) fn image(&self, capability: (i32, i32)) -> Ptx {
        self.machine_code(capability)
            .map_or_else(|| Ptx::from_src(self.ptx), |code| Ptx::from_binary(code.to_vec()))
    }

    /// Whether that lets blocks start while the kernel before still runs, and wait for its end themselves (`KERNEL` in `cu/dev.cuh`).
    pub(super) fn overlaps(&self, capability: (i32, i32)) -> bool {
        capability >= (9, 0) && self.machine_code(capability).is_some()
    }

    fn machine_code(&self, capability: (i32, i32)) -> Option<&'static [u8]> {
        match capability {
            (8, _) => Some(self.sm_80),
            // The "a" means this one only.
            (9, 0) => Some(self.sm_90a),
            (10, _) => Some(self.sm_100),
            (12, _) => Some(self.sm_120),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_generation_gets_its_machine_code_and_others_ptx() {
        for module in MODULES {
            for capability in [(8, 0), (8, 9), (9, 0), (10, 3), (12, 0)] {
                let code = module.machine_code(capability).unwrap();
                assert!(code.starts_with(b"\x7fELF"));
            }
            assert_eq!((module.machine_code((11, 0)), module.machine_code((13, 0))), (None, None));
            let overlaps = [(8, 9), (9, 0), (11, 0), (12, 0)].map(|capability| module.overlaps(capability));
            assert_eq!(overlaps, [false, true, false, true]);
            assert!(module.ptx.contains(".target sm_80"));
            for kernel in module.kernels {
                assert!(module.ptx.contains(&format!(".entry {kernel}(")), "{kernel}");
            }
        }
        for module in HOPPER_MODULES {
            assert!(module.code.starts_with(b"\x7fELF"));
        }
    }
}
