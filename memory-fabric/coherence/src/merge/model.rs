//! Small worlds of merged tables, explored state by state: nodes with programs, the lanes between them,
//! and pages that are ordinary memory before or after they are tables.

mod tests;
mod world;
