//! The same types in a build without libibverbs: none of their values exists, and what would make
//! one fails with [`RdmaError::LeftOut`](crate::RdmaError::LeftOut). So the code above has one form.

pub mod batch;
pub mod device;
pub mod memory;
pub mod pair;
pub mod queue;
pub mod staging;
