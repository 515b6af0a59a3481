//! Nodes in one process that share a memory: contents, under races.

mod increments;
mod mesh;
