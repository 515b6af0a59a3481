//! The first process of a guest that runs one command.
//!
//! It is compiled without the standard library (see `exec-init/main.rs`), and again for the tests
//! of this crate.

pub mod init;
pub mod shell;
pub mod sys;
