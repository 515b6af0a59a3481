//! A small world around the protocol, explored exhaustively and simulated with random delays.

mod checks;
mod explore;
mod homes;
mod hostile;
mod mutants;
mod node;
mod owner;
mod policy;
mod policy_tests;
mod simulate;
mod steps;
mod world;
