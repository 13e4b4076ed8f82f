//! The kernels' machine code, as `build_cubins.py` made it, and which of it a GPU runs.
//!
//! Next: [`super::gpu`] loads it.

/// One file of `cu/`, compiled.
pub(super) struct Module {
    sm_80: &'static [u8],
    sm_90a: &'static [u8],
    sm_100: &'static [u8],
    sm_120: &'static [u8],
    ptx: &'static [u8],
    /// Its kernels.
    pub(super) kernels: &'static [&'static str],
}

macro_rules! modules {
    ($($name:literal: $($kernel:literal)*;)*) => {
        /// All files.
        pub(super) const MODULES: &[Module] = &[$(Module {
            sm_80: include_bytes!(concat!("../../cubins/", $name, ".sm_80.cubin")),
            sm_90a: include_bytes!(concat!("../../cubins/", $name, ".sm_90a.cubin")),
            sm_100: include_bytes!(concat!("../../cubins/", $name, ".sm_100.cubin")),
            sm_120: include_bytes!(concat!("../../cubins/", $name, ".sm_120.cubin")),
            // A driver reads PTX up to a zero.
            ptx: concat!(include_str!(concat!("../../cubins/", $name, ".ptx")), "\0").as_bytes(),
            kernels: &[$($kernel),*],
        }),*];
    };
}

modules! {
    "adjust_logits": "adjust_logits";
    "attention_combine": "attention_combine";
    "attention_decode": "attention_decode_64" "attention_decode_128" "attention_decode_256";
    "attention_prefill": "attention_prefill_64" "attention_prefill_128" "attention_prefill_256";
    "gather": "embed" "select_rows";
    "rms_norm": "rms_norm";
    "rope_store": "rope_store_64" "rope_store_128" "rope_store_256";
    "sample": "sample";
    "silu_mul": "silu_mul";
}

impl Module {
    /// What a GPU of this compute capability runs: machine code of its generation, or PTX that the driver compiles.
    pub(super) fn image(&self, major: i32, minor: i32) -> &'static [u8] {
        match (major, minor) {
            (8, _) => self.sm_80,
            // The "a" means this one only.
            (9, 0) => self.sm_90a,
            (10, _) => self.sm_100,
            (12, _) => self.sm_120,
            _ => self.ptx,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_generation_gets_its_machine_code_and_others_ptx() {
        for module in MODULES {
            let elf = |major, minor| module.image(major, minor).starts_with(b"\x7fELF");
            assert!(elf(8, 0) && elf(8, 9) && elf(9, 0) && elf(10, 3) && elf(12, 0));
            let ptx = std::str::from_utf8(module.image(11, 0)).unwrap();
            assert!(ptx.ends_with('\0') && ptx.contains(".target sm_80"));
            for kernel in module.kernels {
                assert!(ptx.contains(&format!(".entry {kernel}(")), "{kernel}");
            }
        }
    }
}
