//! The parts of HTTP/1's grammar that a client's request and a worker's answer have in common (RFC 9112).
//!
//! State machines that are pushed bytes, wherever those were cut; they do no I/O. Used by the guard before hyper
//! ([`listener::guard`](crate::listener::guard)) and by the connections to workers ([`transport`](crate::transport)).

mod chunks;
mod field;
mod lines;

pub use chunks::ChunkFault;
pub(crate) use chunks::{Chunks, Part};
pub(crate) use field::{FieldFault, TOKEN, byte_table, field};
pub(crate) use lines::{Fault, Lines, count_controls};

/// Fields that a head, or the trailers of a body, may have. As many as hyper has room for.
pub const MAX_FIELDS: usize = 100;
/// Bytes that all trailers of a body may have.
pub const MAX_TRAILER_BYTES: usize = 8 << 10;
/// Bytes of one chunk's size and extensions.
pub const MAX_CHUNK_LINE_BYTES: usize = 1 << 10;
/// Bytes of the extensions of all chunks of a body; nobody uses any, and each costs time to skip.
pub const MAX_EXTENSION_BYTES: usize = 8 << 10;
