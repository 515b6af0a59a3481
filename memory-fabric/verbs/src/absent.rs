//! The same types in a build without libibverbs: they have no values, and every constructor fails
//! with [`RdmaError::LeftOut`](crate::RdmaError::LeftOut). Dependent code therefore needs no
//! conditional compilation.

pub mod batch;
pub mod device;
pub mod memory;
pub mod pair;
pub mod queue;
pub mod staging;

/// Fails, since this build does not use the library.
///
/// # Errors
///
/// Always.
pub fn library_file() -> Result<std::path::PathBuf, crate::RdmaError> {
    Err(crate::RdmaError::LeftOut)
}
