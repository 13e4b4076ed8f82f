//! The grammar of JSON numbers, one byte at a time.

use super::error::Problem;

/// What of a number has been read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Number {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    E,
    Sign,
    Exponent,
}

impl Number {
    /// The number that begins with `byte`, if one may.
    pub(super) fn begin(byte: u8) -> Option<Self> {
        match byte {
            b'-' => Some(Self::Minus),
            b'0' => Some(Self::Zero),
            b'1'..=b'9' => Some(Self::Integer),
            _ => None,
        }
    }

    /// Whether `byte` is none that may stand in a number.
    #[inline(always)]
    pub(super) fn ends_at(byte: u8) -> bool {
        !matches!(byte, b'0'..=b'9' | b'.' | b'e' | b'E' | b'+' | b'-')
    }

    /// The number with `byte` added.
    pub(super) fn next(self, byte: u8) -> Result<Self, Problem> {
        Ok(match (self, byte) {
            (Self::Integer, b'0'..=b'9') => Self::Integer,
            (Self::Point | Self::Fraction, b'0'..=b'9') => Self::Fraction,
            (Self::E | Self::Sign | Self::Exponent, b'0'..=b'9') => Self::Exponent,
            (Self::Minus, b'0') => Self::Zero,
            (Self::Minus, b'1'..=b'9') => Self::Integer,
            (Self::Zero, b'0'..=b'9') => return Err(Problem::LeadingZero),
            (Self::Zero | Self::Integer, b'.') => Self::Point,
            (Self::Zero | Self::Integer | Self::Fraction, b'e' | b'E') => Self::E,
            (Self::E, b'+' | b'-') => Self::Sign,
            _ if self.is_complete() => return Err(Problem::Number),
            _ => return Err(Problem::Expected("a digit")),
        })
    }

    /// Whether a digit would leave it as it is.
    #[inline(always)]
    pub(super) fn takes_digits(self) -> bool {
        matches!(self, Self::Integer | Self::Fraction | Self::Exponent)
    }

    /// Whether it may end here.
    #[inline(always)]
    pub(super) fn is_complete(self) -> bool {
        matches!(self, Self::Zero | Self::Integer | Self::Fraction | Self::Exponent)
    }
}
