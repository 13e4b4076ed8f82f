//! Rotary embedding: the angle of each pair of a head at each position.
//!
//! Computed in f32 where Hugging Face's `modeling_rope_utils.py` does, so that far positions agree with it. Next:
//! [`super::transformer`] hands the angles to the kernels.

/// Rotary embedding of a model.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Rope {
    /// Base of the frequencies.
    pub theta: f64,
    /// How they are stretched for long contexts.
    pub scaling: RopeScaling,
}

/// Ways to stretch the frequencies.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum RopeScaling {
    /// As trained.
    None,
    /// All frequencies divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Llama 3.1: long waves divided by a factor, short ones kept, those between interpolated.
    Llama3 {
        /// Divides the frequency of long waves.
        factor: f64,
        /// `original_context / low_freq_factor` is the wavelength above which a wave is long.
        low_freq_factor: f64,
        /// `original_context / high_freq_factor` is the wavelength below which a wave is short.
        high_freq_factor: f64,
        /// Context length before stretching.
        original_context: f64,
    },
}

impl Rope {
    /// Radians per position of each pair, `[head_dim / 2]`.
    #[must_use]
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let frequency = |pair: usize| {
            let exponent = (2 * pair) as f32 / head_dim as f32;
            let base = 1.0 / self.theta.powf(f64::from(exponent)) as f32;
            self.scaling.apply(base)
        };
        (0..head_dim / 2).map(frequency).collect()
    }
}

impl RopeScaling {
    fn apply(self, frequency: f32) -> f32 {
        match self {
            Self::None => frequency,
            Self::Linear { factor } => frequency / factor as f32,
            Self::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                let wavelength = std::f64::consts::TAU / f64::from(frequency);
                if wavelength < original_context / high_freq_factor {
                    return frequency;
                }
                if wavelength > original_context / low_freq_factor {
                    return frequency / factor as f32;
                }
                let smooth =
                    (original_context / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                let frequency = f64::from(frequency);
                ((1.0 - smooth) * frequency / factor + smooth * frequency) as f32
            }
        }
    }
}

/// Appends the angles of `position`: a cosine for each frequency, then a sine for each.
pub(super) fn push_angles(frequencies: &[f32], position: usize, angles: &mut Vec<f32>) {
    let radians = |frequency: &f32| f64::from(position as f32 * frequency);
    angles.extend(frequencies.iter().map(|frequency| radians(frequency).cos() as f32));
    angles.extend(frequencies.iter().map(|frequency| radians(frequency).sin() as f32));
}

#[cfg(test)]
mod tests {
    use super::*;

    const LLAMA3: RopeScaling = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 8192.0,
    };

    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let plain = Rope { theta: 500_000.0, scaling: RopeScaling::None }.frequencies(128);
        let stretched = Rope { theta: 500_000.0, scaling: LLAMA3 }.frequencies(128);
        assert_eq!(stretched[0], plain[0]);
        assert_eq!(stretched[63], plain[63] / 8.0);
        let between = plain.iter().zip(&stretched).filter(|(p, s)| *s < *p && **s > **p / 8.0).count();
        assert!(between > 0 && between < 16, "{between} pairs lie between");
        assert!(stretched.is_sorted_by(|a, b| a > b));
    }

    #[test]
    fn linear_divides_all() {
        let plain = Rope { theta: 10_000.0, scaling: RopeScaling::None }.frequencies(8);
        let linear = Rope { theta: 10_000.0, scaling: RopeScaling::Linear { factor: 4.0 } }.frequencies(8);
        assert!(plain.iter().zip(&linear).all(|(p, l)| p / 4.0 == *l));
    }

    #[test]
    fn angles_are_cosines_then_sines() {
        let mut angles = Vec::new();
        push_angles(&[1.0, 0.5], 0, &mut angles);
        push_angles(&[1.0, 0.5], 2, &mut angles);
        assert_eq!(angles[..4], [1.0, 1.0, 0.0, 0.0]);
        assert_eq!(angles[4..], [2f64.cos() as f32, 1f64.cos() as f32, 2f64.sin() as f32, 1f64.sin() as f32]);
    }
}
