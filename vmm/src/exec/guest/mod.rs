//! The first process of a guest that runs one command.
//!
//! It is compiled without a standard library (see `exec-init/main.rs`), and once more into the
//! tests of this crate.

pub mod init;
pub mod shell;
pub mod sys;
