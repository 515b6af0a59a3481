//! Nodes that share a memory, in one process and in several: contents, under races.

mod budget;
mod deadlines;
mod depot;
mod discards;
mod gangs;
mod hostile;
mod increments;
mod litmus;
mod losses;
mod mesh;
mod network;
mod processes;
mod programs;
mod puts;
mod tables;
mod writes;
