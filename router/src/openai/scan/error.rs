//! What can be wrong with a body, and where.

/// Why a body could not be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum BodyError {
    /// Not JSON.
    #[error(transparent)]
    Syntax(#[from] SyntaxError),
    /// JSON, but not an object.
    #[error("expected a JSON object, not {found}")]
    NotAnObject {
        /// What it is.
        found: &'static str,
    },
    /// An object of more members than any request has.
    #[error("expected at most {most} members")]
    TooManyMembers {
        /// As many may be there.
        most: usize,
    },
}

/// Where a body ceases to be JSON.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("{problem} at line {line} column {column}")]
pub struct SyntaxError {
    /// What is wrong there.
    pub problem: Problem,
    /// Line of the byte at fault, from 1.
    pub line: usize,
    /// Its column in bytes, from 1; at the end of the body, how many bytes the last line has.
    pub column: usize,
}

/// What is wrong with a byte.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Problem {
    /// Something else should be there.
    #[error("expected {0}")]
    Expected(&'static str),
    /// There is no more.
    #[error("expected {0}, but the body ends")]
    Ends(&'static str),
    /// A raw control character in a string.
    #[error("control characters in strings must be escaped, as in \\n or \\u001f")]
    ControlCharacter,
    /// A backslash before something else.
    #[error("expected one of \" \\ / b f n r t u after the backslash")]
    Escape,
    /// Bytes that are no character.
    #[error("invalid UTF-8")]
    Utf8,
    /// Such as 01.
    #[error("numbers have no leading zeros")]
    LeadingZero,
    /// Such as 1-2 or 1.5.2.
    #[error("this does not belong in a number")]
    Number,
    /// A container too many.
    #[error("nested deeper than {0} levels")]
    TooDeep(usize),
}
